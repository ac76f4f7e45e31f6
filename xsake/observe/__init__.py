"""What runs say, where it goes, and where to find it again."""
