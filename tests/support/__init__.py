"""Helpers that the test files share. Nothing here is a test."""
