package kube

import (
	"fmt"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"
)

// The kinds of multi-cluster services are taken up within 10 seconds of their CRDs,
// however long they were not there.
func TestMultiClusterCRDsThatComeLate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newAPI()
		last := a.beginOf(t, Config{Cluster: "west", Discovery: &Discovery{Network: "west"}, MultiCluster: true, Log: slog.New(slog.DiscardHandler)})
		a.add("services", service("web"))
		time.Sleep(time.Hour)
		if u := last("cluster/west"); len(u.Services) != 1 || u.Services[0].Exported {
			t.Fatalf("without the CRDs: %+v", u)
		}
		a.add("serviceexports", `{"apiVersion":"multicluster.x-k8s.io/v1beta1","kind":"ServiceExport","metadata":{"namespace":"a","name":"web","uid":"e","resourceVersion":"0"}}`)
		for _, resource := range []string{"serviceexports", "serviceimports"} {
			a.add("customresourcedefinitions", fmt.Sprintf(`{"apiVersion":"meta.k8s.io/v1","kind":"PartialObjectMetadata","metadata":{"name":"%s.multicluster.x-k8s.io","uid":%q,"resourceVersion":"0"}}`, resource, resource))
		}
		time.Sleep(10 * time.Second)
		if u := last("cluster/west"); len(u.Services) != 1 || !u.Services[0].Exported {
			t.Errorf("10 s after the CRDs came: %+v", u)
		}
	})
}
