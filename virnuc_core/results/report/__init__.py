"""The HTML report of a run, `report.html`: one file, readable offline."""
