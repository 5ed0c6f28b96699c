package conformance_test

import (
	"context"
	_ "embed"
	"flag"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"text/template"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/gateway-api/conformance"

	"culvert.dev/integration/cluster"
)

func TestMain(m *testing.M) { cluster.Main(m) }

//go:embed manifests.yaml
var manifests string

//go:embed gateway.yaml
var gatewayConfig string

// class is the GatewayClass of manifests.yaml.
const class = "culvert"

// profiles that are claimed, and the extended features of them; the suite takes
// the latter from the GatewayClass' status, where they are.
const (
	profiles = "GATEWAY-TLS,GATEWAY-TCP,GATEWAY-UDP"
	features = "Gateway,ReferenceGrant,TLSRoute,TCPRoute,UDPRoute,TLSRouteModeTerminate,TLSRouteModeMixed," +
		"GatewayPort8080,GatewayStaticAddresses,GatewayAddressEmpty,GatewayInfrastructure,ListenerSet"
)

// addresses is how many the gateway may give to Gateways. The suite has not
// more than twenty at a time. The last is asked for by a test, by name.
const addresses = 40

// unusable is an address of nobody (RFC 5737).
const unusable = "198.51.100.1"

func TestConformance(t *testing.T) {
	report := reportFile(t)
	c := cluster.Start(t, cluster.Options{GatewayAddresses: addresses})
	c.Apply(t, manifests)
	culvert := startGateway(t, c)
	inferred := waitAccepted(t, c, culvert)

	t.Setenv("KUBECONFIG", c.AdminKubeconfig(t))
	usual(t, "gateway-class", class)
	usual(t, "conformance-profiles", profiles)
	usual(t, "usable-address", c.GatewayAddresses[addresses-1].String())
	usual(t, "unusable-address", unusable)
	usual(t, "organization", "culvert")
	usual(t, "project", "culvert")
	usual(t, "url", "https://culvert.dev")
	usual(t, "contact", "https://culvert.dev")
	usual(t, "version", os.Getenv("VERSION"))
	if report != "" {
		usual(t, "report-output", report)
	}
	if one := flag.Lookup("run-test").Value.String(); !inferred || one != "" {
		usual(t, "supported-features", features)
	}
	// The gateway's last words are worth more than the suite's.
	t.Cleanup(func() {
		if report != "" {
			_ = os.Chmod(report, 0o644) // the suite makes it its owner's alone
		}
		select {
		case <-culvert.Done():
			t.Errorf("culvert ended with status %d:\n%s", culvert.ExitCode(), culvert.Tail(40))
		default:
		}
	})
	conformance.RunConformance(t)
}

// usual gives one of the suite's flags a value, unless the user gave another.
func usual(t *testing.T, name, value string) {
	t.Helper()
	set := false
	flag.Visit(func(f *flag.Flag) { set = set || f.Name == name })
	if set || value == "" {
		return
	}
	if err := flag.Set(name, value); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = flag.Set(name, "") })
}

// reportFile is where $CONFORMANCE_REPORT says, and none for a single test.
func reportFile(t *testing.T) string {
	file := os.Getenv("CONFORMANCE_REPORT")
	if file == "" || flag.Lookup("run-test").Value.String() != "" {
		return ""
	}
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		t.Fatal(err)
	}
	return file
}

// startGateway runs culvert with the rights of its ServiceAccount.
func startGateway(t *testing.T, c *cluster.Cluster) *cluster.Process {
	t.Helper()
	var config strings.Builder
	err := template.Must(template.New("gateway.yaml").Parse(gatewayConfig)).Execute(&config, struct {
		Kubeconfig string
		Addresses  []netip.Addr
	}{c.ServiceAccountKubeconfig(t, "culvert-system", "culvert"), c.GatewayAddresses})
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "gateway.yaml")
	if err := os.WriteFile(file, []byte(config.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	return c.RunCulvert(t, "gateway", "--config", file)
}

// waitAccepted waits for the controller to take up its class, and says whether
// it has said there which features it has.
func waitAccepted(t *testing.T, c *cluster.Cluster, culvert *cluster.Process) bool {
	t.Helper()
	classes := c.Dynamic.Resource(schema.GroupVersionResource{Group: "gateway.networking.k8s.io", Version: "v1", Resource: "gatewayclasses"})
	var inferred bool
	deadline := time.Now().Add(30 * time.Second)
	c.Wait(t, time.Minute, func(ctx context.Context) error {
		select {
		case <-culvert.Done():
			t.Fatalf("culvert ended with status %d:\n%s", culvert.ExitCode(), culvert.Tail(40))
		default:
		}
		o, err := classes.Get(ctx, class, metav1.GetOptions{})
		if err != nil {
			return err
		}
		list, _, _ := unstructured.NestedSlice(o.Object, "status", "supportedFeatures")
		inferred = len(list) > 0
		if !cluster.HasCondition(o.Object, "Accepted") {
			if time.Now().After(deadline) {
				t.Fatalf("culvert does not accept GatewayClass %s:\n%s", class, culvert.Tail(40))
			}
			return fmt.Errorf("GatewayClass %s is not accepted", class)
		}
		return nil
	})
	return inferred
}
