"""What a cluster is: devices, links, hosts, prices, and the files that describe them."""
