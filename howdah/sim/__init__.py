"""The same plan, priced: what a layout sends, holds and takes, by arithmetic."""
