"""What a plan sends, holds, takes and costs, computed by arithmetic before it runs."""
