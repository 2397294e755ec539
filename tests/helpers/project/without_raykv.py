"""A `sitecustomize.py` that makes Python behave as if raykv were not installed."""

WITHOUT_RAYKV = """
import sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "raykv":
            raise ModuleNotFoundError("No module named 'raykv'")
sys.meta_path.insert(0, Finder())
"""
