"""Pipeline schedules, one file each, as plain data: what every rank computes, in order."""
