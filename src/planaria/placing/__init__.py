"""Which rows go to RAM and which to an SSD: planaria stats and planaria place.

Statistics from a sample of the samples (sampling, counting, curves, statistics); what a table costs
by how many of its rows are hot (costs); the best such numbers for rows spread over all servers
(filling, spreading) or for whole tables (whole), by HiGHS as well (exact); and the plan (making).
"""
