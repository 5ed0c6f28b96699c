package gatewayapi

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"
	ktesting "k8s.io/client-go/testing"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"
	gwfake "sigs.k8s.io/gateway-api/pkg/client/clientset/versioned/fake"
	typed "sigs.k8s.io/gateway-api/pkg/client/clientset/versioned/typed/apis/v1"
)

// absentAt has a fake API server answer that it does not have a resource, while it is
// true.
func absentAt(f *gwfake.Clientset, resource string, is func() bool) {
	err := apierrors.NewGenericServerResponse(http.StatusNotFound, "list", schema.GroupResource{Group: gwv1.GroupName, Resource: resource}, "", "", 0, true)
	f.PrependReactor("*", resource, func(ktesting.Action) (bool, runtime.Object, error) { return is(), nil, err })
	f.PrependWatchReactor(resource, func(ktesting.Action) (bool, watch.Interface, error) { return is(), nil, err })
}

// TLSRoutes that the API server has in an older version alone are served, and their
// status is written by that version; and a kind that comes late is taken up.
func TestControllerReadsOlderVersions(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		route := testRoute("TLSRoute", "r", "abc.example.com", "{name: web, port: 443}")
		b := newBench(t, edge(passthrough+tcp)+testRoute("TCPRoute", "t", "", "{name: web, port: 443}"))
		yes := func() bool { return true }
		absentAt(b.gw, "tlsroutes", yes)
		middle, old := gwfake.NewSimpleClientset(), gwfake.NewSimpleClientset()
		absentAt(middle, "tlsroutes", yes)
		if err := old.Tracker().Create(schema.GroupVersionResource{Group: gwv1.GroupName, Version: "v1", Resource: "tlsroutes"}, inputsOf(t, base, route).TLSRoutes[0], "a"); err != nil {
			t.Fatal(err)
		}
		var late atomic.Bool // TCPRoutes have no CRD yet
		late.Store(true)
		for _, f := range []*gwfake.Clientset{b.gw, old} {
			absentAt(f, "tcproutes", late.Load)
		}
		b.c.clients.older = map[string]typed.GatewayV1Interface{"v1alpha3": middle.GatewayV1(), "v1alpha2": old.GatewayV1()}
		b.c.clients.versions = newVersions()
		b.c.bundle = func(context.Context) (string, error) { return "v1.2.1", nil }
		defer b.start()()
		calm()
		if u := b.last(); u == nil || u.Err != nil || len(u.Listeners) != 2 || len(u.Listeners[0].Sections[0].Rules) != 1 || len(u.Listeners[1].Sections[0].Rules) != 0 {
			t.Fatalf("got %+v, want the TLSRoute's rule\n%s", u, b.log)
		}
		r, err := old.GatewayV1().TLSRoutes("a").Get(t.Context(), "r", metav1.GetOptions{})
		if err != nil || len(r.Status.Parents) != 1 || !has(r.Status.Parents[0].Conditions, "Accepted", "True", "Accepted") {
			t.Errorf("got %+v, %v, want its status by the version that it is read as", r, err)
		}
		class := func() string {
			c, err := b.gw.GatewayV1().GatewayClasses().Get(t.Context(), "culvert", metav1.GetOptions{})
			if err != nil {
				t.Fatal(err)
			}
			for _, c := range c.Status.Conditions {
				if c.Type == "SupportedVersion" {
					return c.Message
				}
			}
			return ""
		}
		if kinds := b.c.Report().Kinds; kinds["TLSRoutes"] != "v1alpha2" || kinds["TCPRoutes"] != "none" || kinds["Gateways"] != "v1" || len(kinds) != len(olderVersions) {
			t.Errorf("the report has the versions %v", kinds)
		}
		const want = "; TCPRoutes are not read: the API server has no version of them that culvert knows; TLSRoutes are read as v1alpha2"
		if got := class(); !strings.HasSuffix(got, want) {
			t.Errorf("got SupportedVersion %q, want %q", got, want)
		}
		if n := strings.Count(b.log.String(), "resource=tlsroutes version=v1alpha2"); n != 1 {
			t.Errorf("the version is in the log %d times, want once:\n%s", n, b.log)
		}
		late.Store(false)
		time.Sleep(time.Minute)
		synctest.Wait()
		if u := b.last(); u == nil || len(u.Listeners[1].Sections[0].Rules) != 1 {
			t.Errorf("got %+v, want the late TCPRoute's rule", u)
		}
		if got := class(); strings.Contains(got, "TCPRoutes") {
			t.Errorf("got SupportedVersion %q, which has TCPRoutes still", got)
		}
	})
}

// The client of an older version asks and writes by that version, and reads the types of
// v1.
func TestOlderClients(t *testing.T) {
	var asked []string
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked = append(asked, r.Method+" "+r.URL.Path)
		w.Header().Set("Content-Type", "application/json")
		_, version, _ := strings.Cut(r.URL.Path, gwv1.GroupName+"/")
		version, _, _ = strings.Cut(version, "/")
		route := fmt.Sprintf(`{"apiVersion":"gateway.networking.k8s.io/%s","kind":"TLSRoute","metadata":{"name":"r","namespace":"a","resourceVersion":"5"},"spec":{"hostnames":["a.test"],"rules":[{"backendRefs":[{"name":"web","port":443}]}]}}`, version)
		switch {
		case r.Method == http.MethodPut:
			var o gwv1.TLSRoute
			if err := json.NewDecoder(r.Body).Decode(&o); err != nil || o.APIVersion != "gateway.networking.k8s.io/"+version || o.Kind != "TLSRoute" || len(o.Status.Parents) != 1 {
				t.Errorf("%s: got %+v, %v", r.URL.Path, o, err)
			}
			fmt.Fprint(w, route)
		case r.URL.Query().Get("watch") != "":
			fmt.Fprintf(w, `{"type":"ADDED","object":%s}`+"\n", route)
		case r.URL.Path == "/apis/gateway.networking.k8s.io/v1alpha3/namespaces/a/tlsroutes":
			w.WriteHeader(http.StatusNotFound)
			fmt.Fprint(w, `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"NotFound","code":404}`)
		default:
			fmt.Fprintf(w, `{"apiVersion":"gateway.networking.k8s.io/%s","kind":"TLSRouteList","metadata":{"resourceVersion":"5"},"items":[%s]}`, version, route)
		}
	}))
	defer server.Close()
	older, err := newOlder(&rest.Config{Host: server.URL})
	if err != nil {
		t.Fatal(err)
	}
	for resource, versions := range olderVersions {
		for _, version := range versions {
			if older[version] == nil {
				t.Errorf("%s has no client of %s", resource, version)
			}
		}
	}
	if _, err := older["v1alpha3"].TLSRoutes("a").List(t.Context(), metav1.ListOptions{}); !apierrors.IsNotFound(err) {
		t.Errorf("got %v, want that there are none", err)
	}
	routes := older["v1alpha2"].TLSRoutes("a")
	list, err := routes.List(t.Context(), metav1.ListOptions{ResourceVersion: "0"})
	if err != nil || len(list.Items) != 1 || list.Items[0].Spec.Rules[0].BackendRefs[0].Name != "web" {
		t.Fatalf("got %+v, %v", list, err)
	}
	r := list.Items[0]
	r.Status.Parents = []gwv1.RouteParentStatus{{ControllerName: DefaultController}}
	if _, err := routes.UpdateStatus(t.Context(), &r, metav1.UpdateOptions{FieldManager: fieldManager}); err != nil {
		t.Fatal(err)
	}
	w, err := routes.Watch(t.Context(), metav1.ListOptions{AllowWatchBookmarks: true})
	if err != nil {
		t.Fatal(err)
	}
	if e := <-w.ResultChan(); e.Type != watch.Added || e.Object.(*gwv1.TLSRoute).Name != "r" {
		t.Errorf("got %+v", e)
	}
	w.Stop()
	const at = "/apis/gateway.networking.k8s.io/v1alpha2/namespaces/a/tlsroutes"
	if got := strings.Join(asked[1:], " "); got != "GET "+at+" PUT "+at+"/r/status GET "+at {
		t.Errorf("asked %s", got)
	}
}
