package conformance_test

import (
	"testing"

	"sigs.k8s.io/gateway-api/conformance"

	"culvert.dev/integration/cluster"
)

func TestMain(m *testing.M) { cluster.Main(m) }

func TestConformance(t *testing.T) { conformance.RunConformance(t) }
