"""Clusters and workloads that nobody here has: predicted step times of every method. Imports the planner only."""
