//go:build linux && !race

package reliability

// usualConnectors is how many reverse sessions the tests hold.
const usualConnectors = 2000
