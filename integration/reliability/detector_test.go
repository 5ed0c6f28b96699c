//go:build linux && race

package reliability

// usualConnectors is how many reverse sessions the tests hold. With the race detector each takes the
// tests a multiple of what it takes the gateway.
const usualConnectors = 1000
