//go:build linux && netns && race

package networks

// The program under test is built with the race detector where the tests are.
const buildFlag = "-race"
