//go:build linux && netns && !race

package networks

const buildFlag = "-race=false"
