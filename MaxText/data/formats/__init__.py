"""One module for each form of data: `split` a file into units, `read` a unit's documents. Libraries come late."""
