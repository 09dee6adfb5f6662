"""Transport: bounded-loss messages over UDP, a sans-IO core with a thin asyncio shell."""
