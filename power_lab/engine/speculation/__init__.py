"""Exact speculation: drafters propose, one transaction verifies, commits the matching prefix and restores the rest."""
