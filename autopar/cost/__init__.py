"""Prices: of operators by measurement or roofline, of collectives by measurement or closed form."""
