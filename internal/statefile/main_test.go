package statefile

import (
	"testing"

	"culvert.dev/internal/testnet"
)

func TestMain(m *testing.M) { testnet.GoroutinesEnd(m) }
