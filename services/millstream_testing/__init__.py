"""For tests of what talks to Millstream: a fake Processor, and a suite on simulated engines."""
