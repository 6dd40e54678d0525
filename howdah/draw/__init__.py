"""Pictures and tables of plans and of measured steps, as text, SVG and traces."""
