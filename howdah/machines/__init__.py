"""Clusters: devices, links, hosts and prices as data, and the files that describe them."""
