//go:build linux && copyrelay

package reliability

const (
	buildTags        = "copyrelay"
	tunnelBytes      = 24 << 10
	tunnelGoroutines = 2
	reloadGrowth     = 2
)
