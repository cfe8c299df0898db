"""The demonstration's study: UCI heart disease at four hospitals, its job file, and what it is compared with."""
