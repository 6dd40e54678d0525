"""What a trained model is used for: text, hidden words, features, scores on a task's file."""
