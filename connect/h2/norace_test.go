//go:build !race

package h2

// fills is the part of a path that a stream has to fill.
const fills = 0.7
