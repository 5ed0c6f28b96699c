package join

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"culvert.dev/identity"
	"culvert.dev/registry/peer"
)

// restarted returns a site that has the files of a folder, as one that starts has, and why it
// cannot use them.
func restarted(t *testing.T, folder string) (*Site, error) {
	t.Helper()
	s := &Site{Store: new(identity.Store)}
	t.Cleanup(s.Close)
	return s, s.Use(&Settings{Name: "inviting", Key: "gw", Trust: "inviting.example", State: folder})
}

// wantTrusted returns how many peers s has. It reports those for whom there is no bundle.
func wantTrusted(t *testing.T, s *Site) int {
	t.Helper()
	all := s.Peers()
	for i := range all {
		if b, err := s.Store.Trust(all[i].TrustDomain()).Bundle(); err != nil || len(b.Roots) == 0 {
			t.Errorf("peer %q may offer names of %v, and there is no bundle for it: %v", all[i].Name, all[i].Zones, err)
		}
	}
	return len(all)
}

// A gateway that has stopped at any moment of a join has after its restart no peer without its
// bundle: one file has both, and a catalog of the peer is used only beside it.
func TestRestartHasNoPeerWithoutItsBundle(t *testing.T) {
	east, west := newSite(t, "inviting"), newSite(t, "west")
	changes := 0
	east.Changed = func() { // what offers the names looks now
		changes++
		if wantTrusted(t, east.Site) != 1 {
			t.Error("there is no peer where others are told of it")
		}
	}
	token := invite(t, east)
	folder := east.settings.State
	read := func() []byte {
		data, err := os.ReadFile(filepath.Join(folder, "peers.json"))
		if err != nil {
			t.Fatal(err)
		}
		return data
	}
	before := read()
	if _, err := join(t, west, token); err != nil {
		t.Fatal(err)
	}
	after := read()
	if changes != 1 {
		t.Errorf("others are told %d times of the peer, want once", changes)
	}
	east.Close()

	// start puts files in a folder and starts a site there.
	start := func(files map[string]string) (*Site, error) {
		folder := t.TempDir()
		for name, content := range files {
			path := filepath.Join(folder, name)
			if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		return restarted(t, folder)
	}
	const catalog = "names that the peer has offered before"

	t.Run("the file is cut short", func(t *testing.T) {
		for n := 0; n < len(strings.TrimSpace(string(after))); n += 7 {
			s, err := start(map[string]string{"peers.json": string(after[:n]), "west/catalog": catalog})
			if err == nil || !strings.Contains(err.Error(), "damaged") {
				t.Fatalf("of the first %d of %d bytes: error %v, want that the file is damaged", n, len(after), err)
			}
			if n := len(s.Peers()); n != 0 {
				t.Fatalf("of a part of the file there are %d peers, want none", n)
			}
			s.Close()
		}
	})
	t.Run("the new file is not in its place yet", func(t *testing.T) {
		for _, n := range []int{0, 1, len(after) / 2, len(after)} {
			s, err := start(map[string]string{"peers.json": string(before), "peers.json.new": string(after[:n]), "west/catalog": catalog})
			if err != nil || wantTrusted(t, s) != 0 {
				t.Errorf("beside %d of %d bytes of it: %v, %d peers; want none, the join has not been answered", n, len(after), err, len(s.Peers()))
			}
			s.Close()
		}
	})
	t.Run("there is a catalog alone", func(t *testing.T) {
		if s, err := start(map[string]string{"west/catalog": catalog}); err != nil || wantTrusted(t, s) != 0 {
			t.Errorf("error %v, %d peers; want neither", err, len(s.Peers()))
		}
	})
	t.Run("the file is whole", func(t *testing.T) {
		if s, err := start(map[string]string{"peers.json": string(after)}); err != nil || wantTrusted(t, s) != 1 {
			t.Errorf("error %v, %d peers; want west", err, len(s.Peers()))
		}
	})

	// A file that somebody has written so that a bundle is missing.
	other := newSite(t, "other")
	_, foreign, err := other.own(&other.settings)
	if err != nil {
		t.Fatal(err)
	}
	for name, bundle := range map[string]string{"no bundle": `null`, "an empty bundle": `{"keys":[]}`, "a damaged bundle": `{"keys":[{"kty":"EC"}]}`} {
		t.Run(name, func(t *testing.T) {
			var got state
			if err := json.Unmarshal(after, &got); err != nil {
				t.Fatal(err)
			}
			got.Peers[0].Bundle = json.RawMessage(bundle)
			// A peer whose bundle is right comes first.
			got.Peers = append([]member{{Name: "other", ID: "spiffe://other.example/gw", Bundle: foreign, Zones: []string{"*.other.example"}, Gateways: []peer.Gateway{}}}, got.Peers...)
			data, err := json.Marshal(&got)
			if err != nil {
				t.Fatal(err)
			}
			s, err := start(map[string]string{"peers.json": string(data)})
			if err == nil || !strings.Contains(err.Error(), `peer "west"`) {
				t.Errorf("error %v, want one about peer west", err)
			}
			if n := wantTrusted(t, s); n != 0 {
				t.Errorf("there are %d peers, want none of a file that is wrong", n)
			}
		})
	}
}
