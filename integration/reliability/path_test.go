//go:build linux && !copyrelay

package reliability

// What is promised of the gateway under test. It is built with this suite's
// own tags: "go test -tags copyrelay" is of one without an event loop for
// tunnels, which may cost more and must do the same.
const (
	buildTags        = ""
	tunnelBytes      = 6 << 10 // of an idle one
	tunnelGoroutines = 0
	reloadGrowth     = 4 // the part of its resident memory by which it may grow: the runtime keeps some for later
)
