"""Parts of bench_peers.py."""
