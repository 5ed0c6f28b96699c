//go:build !copyrelay && (amd64 || arm64)

package relay

// InKernel says that pairs of sockets go to the event loop. The build tag
// copyrelay sends them the way of all other pairs, so that every test can be
// run over both.
const InKernel = true
