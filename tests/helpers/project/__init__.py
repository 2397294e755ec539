"""This repository: its pages, examples, versions, and how long its tests take."""
