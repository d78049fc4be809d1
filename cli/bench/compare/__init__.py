"""Servers beside one another: started, asked the same in turn, and set in ratio."""
