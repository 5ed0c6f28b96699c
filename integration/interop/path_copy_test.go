//go:build unix && copyrelay

package interop

const buildTags = "copyrelay"
