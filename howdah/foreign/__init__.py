"""Any torch module on several processes: what `howdah.distribute` does."""
