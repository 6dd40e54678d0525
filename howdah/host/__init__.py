"""The resources of this machine: cores, memory, disks, network interfaces; and checks of them."""
