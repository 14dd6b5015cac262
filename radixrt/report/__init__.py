"""Plans and runs as pages, plots and tables."""
