//go:build race

package h2

// fills is the part of a path that a stream has to fill: the detector is slow.
const fills = 0.4
