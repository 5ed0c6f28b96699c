//go:build unix && race

package interop

const raceEnabled = true
