"""Steps to tokens on one device."""
