//go:build unix && !copyrelay

package interop

// The gateway is built with the tests' own tags: "go test -tags copyrelay" is of
// one without an event loop for tunnels, which is to do the same.
const buildTags = ""
