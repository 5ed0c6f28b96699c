package gateway

import (
	"testing"

	"culvert.dev/internal/testnet"
)

func TestMain(m *testing.M) {
	testnet.Parallel(6)
	testnet.GoroutinesEnd(m)
}
