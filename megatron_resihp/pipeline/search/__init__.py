"""Searching for a fast pipeline: layers, devices and order of ops, under a memory limit."""
