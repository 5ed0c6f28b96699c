// Package spiffetest has a Workload API for tests: an agent whose answers a test sets.
package spiffetest
