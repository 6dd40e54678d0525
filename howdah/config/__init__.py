"""What a user writes, and how it becomes a job: recipes, overrides, drafts."""
