"""What runs where: data and arithmetic. No torch, no clock, no files on this floor."""
