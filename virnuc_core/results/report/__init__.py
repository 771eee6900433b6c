"""The page of a run that a person opens in a browser, `report.html`: one file, readable without a network."""
