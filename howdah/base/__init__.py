"""What every floor needs and none owns."""
