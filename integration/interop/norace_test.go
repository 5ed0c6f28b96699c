//go:build unix && !race

package interop

const raceEnabled = false
