"""From a model and some tokens to the tokens that follow: drawn, or searched for; and how likely
given ones are.
"""
