"""What this machine has: cores, memory, disks, interfaces, and what each lack means."""
