"""Load for the HTTP endpoint: arrivals, length distributions, reports."""
