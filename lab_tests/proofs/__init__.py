"""Cases with which the tests prove the lab. ``python -m lab_tests.proofs`` runs all of them."""
